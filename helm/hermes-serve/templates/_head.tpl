{{/* The head: Ray's GCS, its dashboard, Serve's controller. With autoscaling, KubeRay adds the autoscaler's container.
     Only that container mounts the token for the Kubernetes API, because Ray runs any code that it is sent. */}}
{{- define "hermes.headTemplate" -}}
{{- $pod := dict "root" . "component" "head" "group" .Values.head -}}
{{- $scheduling := include "hermes.soonElsewhere" .Values.head.scheduling | fromYaml -}}
metadata:
  {{- include "hermes.podMetadata" $pod | nindent 2 }}
spec:
  serviceAccountName: {{ .Release.Name }}-head
  automountServiceAccountToken: false
  enableServiceLinks: false
  # Serve's and Ray's state is in Redis and no client is connected, so there is nothing to wait for. A new head starts only
  # when this one has gone.
  terminationGracePeriodSeconds: 10
  {{- include "hermes.pullSecrets" . | nindent 2 }}
  {{- include "hermes.podSecurity" (dict "root" . "id" 10001) | nindent 2 }}
  {{- include "hermes.scheduling" $scheduling | nindent 2 }}
  initContainers:
    {{- include "hermes.checkRedis" $pod | nindent 4 }}
  containers:
    - name: ray-head
      image: {{ include "hermes.rayImage" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      {{- include "hermes.containerSecurity" $pod | nindent 6 }}
      env:
        {{- include "hermes.rayEnvironment" $pod | nindent 8 }}
      ports: # KubeRay creates Services for them by these names
        - name: gcs-server
          containerPort: 6379
        - name: dashboard
          containerPort: 8265
        - name: serve
          containerPort: 8000
        - name: metrics
          containerPort: 8080
        - name: agent
          containerPort: 52365
        - name: as-metrics
          containerPort: 44217
        - name: dash-metrics
          containerPort: 44227
      {{- include "hermes.resources" (dict "root" . "cpus" .Values.head.cpus "memory" .Values.head.memory) | nindent 6 }}
      {{- include "hermes.rayletProbes" . | nindent 6 }}
      readinessProbe:
        httpGet: {path: /api/gcs_healthz, port: dashboard}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 6
      volumeMounts:
        {{- include "hermes.rayMounts" $pod | nindent 8 }}
  volumes:
    {{- include "hermes.rayVolumes" $pod | nindent 4 }}
    {{- if include "hermes.autoscaling" . | fromJson }}
    - name: kubernetes-api # what Kubernetes would otherwise mount into every container
      projected:
        sources:
          - serviceAccountToken:
              path: token
              expirationSeconds: 3607
          - configMap:
              name: kube-root-ca.crt
              items:
                - key: ca.crt
                  path: ca.crt
          - downwardAPI:
              items:
                - path: namespace
                  fieldRef:
                    fieldPath: metadata.namespace
    {{- end }}
{{- end }}
